"""Collaborative runs: peers anywhere train one model in time-boxed rounds. The only place that knows hivemind."""
