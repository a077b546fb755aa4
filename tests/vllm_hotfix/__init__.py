"""The hotfix for stock vLLM, and the description of vLLM's connector interface."""
