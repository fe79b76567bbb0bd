"""Many runs: in this process, in several, over a cluster, or one run in all processes of torchrun."""
