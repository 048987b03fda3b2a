"""Plans: every decision about how a problem is computed on a GPU, made by a model of the machine."""
