#!/usr/bin/env bash
# Passes the kernels through NVIDIA's assembler for three generations of GPUs, and prints registers, shared memory and spills as a
# table. Fails when a kernel is refused or spills. Needs ptxas: from a CUDA toolkit, or of the package nvidia-cuda-nvcc of PyPI, which
# the script installs into a folder of its own (argument 1, default kvprofile-ptxas in the temporary folder) when there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-${TMPDIR:-/tmp}/kvprofile-ptxas}"
mkdir -p "$folder"
ptxas="$(command -v ptxas || find "$folder" -name ptxas -type f | head -n1)"
if [ -z "$ptxas" ]; then
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" nvidia-cuda-nvcc >&2
	ptxas="$(find "$folder" -name ptxas -type f | head -n1)"
fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
for sm in 80 90 120; do
	for ptx in internal/engine/cuda/kernels/*.ptx; do
		"$ptxas" -v -arch="sm_$sm" -o "$scratch/out" "$ptx" 2>&1 | sed "s/^/$sm /"
	done
done >"$scratch/log"
awk '
	/Compiling entry function/ { split($0, p, "\047"); name = p[2] }
	/bytes spill stores/ {
		for (i = 1; i <= NF; i++) {
			if ($(i + 1) == "bytes" && $(i + 2) == "spill" && $i > 0) { print "spills: " name " for sm_" $1 > "/dev/stderr"; bad = 1 }
			if ($(i + 1) == "bytes" && $(i + 2) == "stack" && $i > 0) { print "stack: " name " for sm_" $1 > "/dev/stderr"; bad = 1 }
		}
	}
	/Used [0-9]+ registers/ {
		for (i = 1; i <= NF; i++) {
			if ($i == "Used") registers[name, $1] = $(i + 1)
			if ($(i + 2) ~ /^smem/) shared[name] = $i
		}
		if (!(name in seen)) { seen[name] = 1; order[n++] = name }
	}
	END {
		print "| kernel | registers sm_80 | sm_90 | sm_120 | shared memory, bytes |"
		print "|---|---|---|---|---|"
		for (i = 0; i < n; i++) {
			k = order[i]
			print "| " k " | " registers[k, 80] " | " registers[k, 90] " | " registers[k, 120] " | " shared[k] + 0 " |"
		}
		exit bad
	}' "$scratch/log"
