"""`kgorch check`: the machine, trial steps of each stage, the determinism check, and where a start would go on.

May import admission, launch, limits, hardware, snapshots, plan and all below them."""
