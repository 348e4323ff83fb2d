"""Our own KV connector for vLLM: decode reads KV while prefill still computes.

One worker is a family of processes on one host, and each has a part in it:

    main        `handoffs.py`   turns what happens into Handoff messages, and the router's word into notes
    engine core `scheduler.py`  vLLM's scheduler, which also minds news of transfers and sleeps while it waits for them
                `holds.py`      which blocks are held, and which requests wait for theirs
    rank        `rank.py`       registers KV memory and runs the transfer thread (`kv/mover.py`)

They tell each other small notes over datagram sockets (`notes.py`); the KV itself and the signals beside it go from
rank to rank over `kv/transport.py`. `connector.py` is what vLLM sees of it.
"""
