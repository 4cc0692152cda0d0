"""TensorFlow: DP-SGD by tf.function(jit_compile=True) around vectorised per-example gradients, and without privacy."""
