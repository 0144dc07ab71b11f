"""The comparison: every policy's step really run on the same weights, timed, checked and summarised."""
