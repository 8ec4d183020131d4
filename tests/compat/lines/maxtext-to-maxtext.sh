# Conversion by today's path
# source: MaxText, docs/guides/checkpointing_solutions/convert_checkpoint.md
# expect: runs
# bucket: yes
python3 -m maxtext.checkpoint_conversion.to_maxtext model_name=${HF_MODEL?} base_output_directory=${BASE_OUTPUT_DIRECTORY?} scan_layers=True use_multimodal=false hardware=cpu skip_jax_distributed_system=true checkpoint_storage_use_zarr3=$((1 - USE_PATHWAYS)) checkpoint_storage_use_ocdbt=$((1 - USE_PATHWAYS)) --save_dtype=bfloat16
