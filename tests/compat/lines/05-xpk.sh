# The Pathways tutorial, Llama 3.1 70B
# source: MaxText, docs/tutorials/grpo_with_pathways.md
# expect: needs xpk
xpk workload create-pathways --workload $WORKLOAD --docker-image path/to/gcr.io:latest --cluster $TPU_CLUSTER --tpu-type=$TPU_TYPE --num-slices=1 --zone=$ZONE --project=$PROJECT_ID --priority=high --command "HF_TOKEN=$HF_TOKEN TF_CPP_MIN_LOG_LEVEL=0 JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 ENABLE_PATHWAYS_PERSISTENCE='1' python src/MaxText/examples/grpo_llama3_1_70b_demo_pw.py"
