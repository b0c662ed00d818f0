#!/usr/bin/env bash
# Every study of the methodology at size mini, into results/: about 130 minutes on two cores. What is there already is kept.
# HARDWARE=NAME names the machine in the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/setup.sh train
mini=(--size mini --set "submission.hardware=${HARDWARE:-auto}")
apart=(--results results/study/tuned --systems results/study/tuned --continue)
study() { echo "== ttt $*"; .venv/bin/ttt "$@"; }
for benchmark in language_bert image_classification; do study data prepare $benchmark --size mini; done
study inspect profile language_bert optimized "${mini[@]}" --delay-data 20
study inspect profile image_classification optimized "${mini[@]}" --delay-data 250 --set data.loader=workers
for benchmark in language_bert image_classification; do
  study sweep $benchmark baseline optimized "${mini[@]}" --budgets 0.15,0.3,0.5,1 --seeds 3
  study ablate $benchmark optimized "${mini[@]}"
  study inspect profile $benchmark optimized "${mini[@]}"
  for level in 0 1; do study run $benchmark baseline "${mini[@]}" "${apart[@]}" "-O$level" --runs 2 --seed 1; done
done
study estimate language_bert optimized "${mini[@]}"
study run language_bert optimized "${mini[@]}" "${apart[@]}" --runs 3
study estimate --score
study report --explore results
