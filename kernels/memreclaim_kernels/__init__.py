"""Kernels and storage format of fp8 twins; importing it loads torch and nothing else."""
