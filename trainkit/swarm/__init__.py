"""Collaborative runs: peers anywhere train one model in timed rounds. The only room that knows hivemind."""
