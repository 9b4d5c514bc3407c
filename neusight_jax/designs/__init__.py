"""Hardware design: costs of a chip, search under budgets, Pareto fronts, inverse questions."""
