"""Which workers may exchange KV."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from twostroke.kv.layout import difference
from twostroke.policy.plan import Options
from twostroke.router.links import Pair
from twostroke.router.member import Member
from twostroke.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL


def refused_pairs(members: Iterable[Member], options: Options) -> Mapping[Pair, str]:
    """Pairs of known workers that cannot, and why."""
    return {
        (source.address, reader.address): why
        for source, reader in _pairs(members, options)
        if source.info is not None and reader.info is not None
        if (why := difference(source.info.layout, reader.info.layout))
    }


def link_pairs(members: Iterable[Member], options: Options, refused: Container[Pair]) -> list[tuple[Member, Member]]:
    """Pairs of known workers that are to have a link; none where no way uses any."""
    if not (options.p_then_d or options.lent_decoder):
        return []
    return [pair for pair in _pairs(members, options) if (pair[0].address, pair[1].address) not in refused]


def _pairs(members: Iterable[Member], options: Options) -> list[tuple[Member, Member]]:
    """Those that a plan may bring together: a lent decoder may hand over, too."""
    known = [member for member in members if member.info is not None]
    readers = [member for member in known if member.role != ROLE_PREFILL]
    return [
        (source, reader)
        for source in known
        if source.role != ROLE_DECODE or options.lent_decoder
        for reader in readers
        if source is not reader
    ]
