"""Measuring kernels and models on the machine at hand: cases, their operands, clocks, a journal, a data card."""
