#!/usr/bin/env bash
# Compiles the kernels to PTX. Needs clang++-19 (Debian: apt-get install clang-19); nothing of CUDA.
# build.sh [folder]: where the .ptx files go, beside the sources by default.
set -euo pipefail
cd "$(dirname "$0")"
out="${1:-.}"
for source in *.cu; do
	# The PTX version is named so that a newer compiler does not ask for a newer driver: 7.0 runs from driver 450 on.
	clang++-19 -x cuda --cuda-device-only -S --cuda-gpu-arch=sm_80 --cuda-feature=+ptx70 -nocudainc -nocudalib -O3 -std=c++17 \
		-fno-exceptions -fcuda-flush-denormals-to-zero -o "$out/${source%.cu}.ptx" "$source"
done
