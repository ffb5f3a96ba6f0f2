#!/bin/sh
# A new database for POSTGRES_USER with POSTGRES_PASSWORD, named POSTGRES_DB, unless there is one.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    printf '%s' "$POSTGRES_PASSWORD" > /tmp/password
    initdb --username "$POSTGRES_USER" --pwfile /tmp/password --auth scram-sha-256 --encoding UTF8 --locale C.UTF-8
    rm /tmp/password
    echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE \"$POSTGRES_DB\"" | postgres --single -j -D "$PGDATA" postgres
fi
exec postgres -c 'listen_addresses=*' -c unix_socket_directories=/tmp
