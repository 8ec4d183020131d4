"""What each layer gets beside the residual stream."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from small import LLAMA2, random_parameters, roles

from shoal.model.architecture import Layer
from shoal.model.block import LayerAux, LayerInputs, SharedKeys
from shoal.model.layers import by_layer
from shoal.model.transformer import Model, layer_embeddings, through_layers

LOCAL, WHOLE = Layer(window=4), Layer()
SEVERAL_GROUPS = replace(LLAMA2, num_layers=7, pattern=(LOCAL, LOCAL, WHOLE))
"""Two repetitions of the pattern, and a layer by itself."""


def test_each_layer_gets_its_own_inputs_in_a_scan_and_one_after_the_other():
    model = Model(SEVERAL_GROUPS, roles().trainer)
    blocks = random_parameters(SEVERAL_GROUPS).blocks
    inputs = LayerInputs(jnp.arange(1.0, 8.0))

    def compute(layer, weights, x, cache, inputs, keys):
        """Appends the layer's digit to the number x."""
        digit = inputs.embedding * (1 if layer.window else -1)
        return 10 * x + digit, LayerAux(digit)

    x = jnp.zeros(())
    scanned, of_scan = through_layers(model, blocks, x, compute, inputs=inputs)
    layers = by_layer(model, blocks)
    unrolled, aux = through_layers(model, layers, x, compute, inputs=inputs)
    digits = [1, 2, -3, 4, 5, -6, 7]
    assert scanned == unrolled == np.polyval(digits, 10)
    assert [of_layer.cache for of_layer in of_scan] == digits
    assert [of_layer.cache for of_layer in aux] == digits


def test_a_layer_gets_what_the_one_left_whose_keys_it_reads():
    """Others leave nothing: a scan would keep the keys of all layers of a stack."""
    shared = (replace(LOCAL, keys_of=4), replace(WHOLE, keys_of=2), replace(LOCAL, keys_of=4))
    a = replace(SEVERAL_GROUPS, num_layers=8, pattern=(LOCAL, LOCAL, WHOLE, LOCAL, LOCAL, *shared))
    model = Model(a, roles().trainer)
    blocks = random_parameters(a).blocks
    numbers = LayerInputs(jnp.arange(8.0))

    def compute(layer, weights, x, cache, inputs, keys):
        """Leaves the layer's number, or appends to x the one that it has got."""
        if keys is not None:
            return 10 * x + keys.k, LayerAux(None)
        return x, LayerAux(None, keys=SharedKeys(inputs.embedding, None, None))

    x = jnp.zeros(())
    scanned, of_scan = through_layers(model, blocks, x, compute, inputs=numbers)
    unrolled, _ = through_layers(model, by_layer(model, blocks), x, compute, inputs=numbers)
    assert scanned == unrolled == 424
    left = [number for number, of_layer in enumerate(of_scan) if of_layer.keys is not None]
    assert left == [2, 4]


def test_embeddings_of_layers_are_a_tables_entry_and_a_product_side_by_side():
    a = replace(LLAMA2, num_layers=3, layer_embedding_size=5)
    weights = random_parameters(a).layer_embedding
    tokens = np.array([[3, 1, 3, 90]])
    x = np.random.default_rng(0).standard_normal((1, 4, a.hidden_size)).astype(np.float32)
    model = Model(a, roles().trainer)
    found = layer_embeddings(model, weights, jnp.asarray(tokens), jnp.asarray(x))
    assert found is not None and found.shape == (3, 1, 4, 5)
    table, projection, norm = jax.tree.map(np.float64, jax.tree.leaves(weights))
    product = (x @ projection / a.hidden_size**0.5).reshape(1, 4, 3, 5)
    product /= np.sqrt((product**2).mean(-1, keepdims=True) + a.norm_eps)
    expected = (product * norm + table[tokens].reshape(1, 4, 3, 5) * 5**0.5) / 2**0.5
    assert np.abs(np.moveaxis(expected, 2, 0) - found).max() < 1e-5
