"""Scoring predictors on measurements: protocols, baselines, leaderboard."""
