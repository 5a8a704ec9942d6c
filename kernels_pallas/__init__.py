"""Kernels: one folder per op, with one public interface each."""
