from semkv_bench.models.shape import ModelShape


def test_reading_a_shape_leaves_the_configuration_of_a_loaded_model_alone(tiny_llama):
    config = tiny_llama.model.config
    config.hidden_act = "gelu"  # no shape of this configuration is known yet
    try:
        before = config.to_dict(), config._attn_implementation
        ModelShape.of(config)
        assert (config.to_dict(), config._attn_implementation) == before
    finally:
        config.hidden_act = "silu"
