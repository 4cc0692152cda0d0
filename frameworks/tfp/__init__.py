"""TensorFlow Privacy, DP-SGD for Keras."""
