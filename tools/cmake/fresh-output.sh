#!/bin/sh
# Runs a compiler's command line after it has removed what the command is to write. Between a
# precompiled header and ccache: with the old one still there, -include finds it, and ccache takes
# it for what the new one is to be made of.
output=
for argument in "$@"; do
  [ "$output" != -o ] || { rm -f -- "$argument"; break; }
  output=$argument
done
exec "$@"
