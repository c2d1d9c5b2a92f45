#!/bin/sh
# Prints a Python of at least 3.12 that runs and can make virtual environments, or says what it looked for.
# A pyenv shim exists on PATH for versions that are not active too, and fails, so each is tried.
works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}
names="python3.14 python3.13 python3.12 python3"
for name in $names; do
    found=$(command -v "$name") && works "$found" && echo "$found" && exit 0
done
root=${PYENV_ROOT:-$HOME/.pyenv}
for found in "$root"/versions/3.1[2-9]*/bin/python "$root"/versions/3.[2-9][0-9]*/bin/python; do
    works "$found" && echo "$found" && exit 0
done
echo "no Python >= 3.12 with venv found; looked for $names on PATH and in $root/versions" >&2
exit 1
