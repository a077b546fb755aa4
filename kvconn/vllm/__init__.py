"""kvconn inside vLLM."""
