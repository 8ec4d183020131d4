# Conversion of Llama 3.1 70B
# source: MaxText, docs/tutorials/grpo_with_pathways.md
# expect: runs
# bucket: yes
python3 -m MaxText.utils.ckpt_conversion.to_maxtext MaxText/configs/base.yml model_name=llama3.1-70b hf_access_token=${HF_TOKEN} base_output_directory=${BASE_OUTPUT_DIRECTORY}/${RUN_NAME} scan_layers=True hardware=cpu skip_jax_distributed_system=true --lazy_load_tensors=true
