#!/bin/sh
# Makes the base image from Debian's packages, for machines that reach Debian but no image registry.
# usage: local_base.sh [TAG]   Needs root, docker and debootstrap. The root file system is kept under build/ for the next time.
set -eu
tag=${1:-twostroke-base:local}
docker=${DOCKER:-docker}
folder=${CACHE:-build/base}
if "$docker" image inspect "$tag" >/dev/null 2>&1; then exit 0; fi
if [ ! -f "$folder.tar" ]; then
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null |
        awk '/^URIs:/ { print $2; exit } /^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:\/\//) { print $i; exit } }')
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,libgomp1 bookworm "$folder" "$mirror"
    # Certificates that this machine trusts beyond Debian's, and nothing that only apt needs.
    cp /usr/local/share/ca-certificates/*.crt "$folder/usr/local/share/ca-certificates/" 2>/dev/null || true
    chroot "$folder" update-ca-certificates >/dev/null
    rm -rf "$folder"/var/lib/apt/lists/* "$folder"/var/cache/apt/archives/*.deb "$folder"/usr/share/doc "$folder"/usr/share/locale
    tar -C "$folder" -cf "$folder.tar.part" .
    mv "$folder.tar.part" "$folder.tar"
    rm -rf "$folder"
fi
"$docker" import -c 'CMD ["bash"]' "$folder.tar" "$tag" >/dev/null
