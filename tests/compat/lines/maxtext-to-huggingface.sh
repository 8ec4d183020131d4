# Conversion back
# source: MaxText, docs/guides/checkpointing_solutions/convert_checkpoint.md
# expect: runs
# bucket: yes
python3 -m maxtext.checkpoint_conversion.to_huggingface model_name=${MODEL?} load_parameters_path=${MAXTEXT_CKPT_PATH?} base_output_directory=${BASE_OUTPUT_DIRECTORY?} hardware=cpu skip_jax_distributed_system=true scan_layers=true use_multimodal=false weight_dtype=bfloat16
