#!/usr/bin/env bash
# Certificates for Ray's TLS: an authority, and a certificate that names all nodes of a cluster.
#   tools/make_certificates.sh FOLDER ADDRESS...     all nodes, as cluster.yaml names them
# FOLDER gets ca.crt, node.crt and node.key, which every node and client needs, and ca.key, which
# none of them needs: whoever has it can let others in. Run again for other nodes: the authority
# stays, so that nodes with the old certificate and nodes with the new one still know each other.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
folder=$1
shift
umask 077
mkdir -p "$folder"
cd "$folder"
plain=$'[req]\ndistinguished_name=name\n[name]\n'  # whatever the machine's openssl.cnf says
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)

if [ ! -e ca.key ]; then
  openssl req -x509 "${key[@]}" -keyout ca.key -out ca.crt -days 3650 -subj "/CN=ray_pipe authority" \
    -config <(echo "$plain") -addext basicConstraints=critical,CA:TRUE \
    -addext keyUsage=critical,keyCertSign 2>/dev/null
fi

names=IP:127.0.0.1,DNS:localhost
for address in "$@"; do
  if [[ $address =~ ^[0-9.]+$ || $address == *:* ]]; then names+=",IP:$address"; else names+=",DNS:$address"; fi
done
openssl req "${key[@]}" -keyout node.key -out node.csr -subj "/CN=ray_pipe node" \
  -config <(echo "$plain") 2>/dev/null
openssl x509 -req -in node.csr -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
  -days 825 -extfile <(echo "subjectAltName=$names") -out node.crt 2>/dev/null
rm node.csr
echo "$folder: ca.crt, node.crt and node.key are for every node and client; ca.key stays here"
