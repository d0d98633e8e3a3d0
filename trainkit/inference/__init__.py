"""Uses of a trained model: scores, predictions, exports, probes."""
