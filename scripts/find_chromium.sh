#!/bin/sh
# Prints the path of a Chromium. Where there is none, apt installs Debian's and a font, which takes root.
set -eu

find_it() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" && return
    done
    return 1
}

fail() {
    echo "find_chromium: there is no chromium here, and $1; install it and try again" >&2
    exit 1
}

find_it && exit
command -v apt-get > /dev/null || fail "no apt-get to install it with"
[ "$(id -u)" = 0 ] || fail "only root can install it with apt-get"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-inter; } >&2 ||
    fail "apt-get could not install it"
find_it || fail "what apt-get installed is not on PATH"
