#!/bin/sh
# Start-up script of a spot VM: installs the service and starts it.  It runs at every boot, so a VM
# that comes back after it was taken away goes on with the job where it was.
#
#   startup.sh in.jsonl --output /mnt/disk/out.jsonl [more arguments of jaxserve batch]
#
# Arguments must not hold spaces.  JAXSERVE names the program; ETC and UNITS where files go.
set -eu
if [ $# -lt 3 ]; then
    echo "usage: startup.sh INPUT... --output FILE [options of jaxserve batch]" >&2
    exit 2
fi
program=${JAXSERVE:-$(command -v jaxserve)}
etc=${ETC:-/etc}
units=${UNITS:-/etc/systemd/system}
printf 'JAXSERVE=%s\nJAXSERVE_BATCH=%s\n' "$program" "$*" > "$etc/jaxserve-batch.env"
cp "$(dirname "$0")/jaxserve-batch.service" "$units/jaxserve-batch.service"
systemctl daemon-reload
systemctl enable jaxserve-batch.service
systemctl restart --no-block jaxserve-batch.service
