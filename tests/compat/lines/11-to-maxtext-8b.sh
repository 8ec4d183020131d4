# Conversion of Llama 3.1 8B Instruct
# source: MaxText, docs/tutorials/grpo.md
# expect: runs
# bucket: yes
python3 -m MaxText.utils.ckpt_conversion.to_maxtext src/MaxText/configs/base.yml model_name=${HF_MODEL} hf_access_token=${HF_TOKEN} base_output_directory=${BASE_OUTPUT_DIRECTORY}/${RUN_NAME} scan_layers=True hardware=cpu skip_jax_distributed_system=true
