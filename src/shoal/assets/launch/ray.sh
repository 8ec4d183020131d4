: "${RAY_API_SERVER_ADDRESS:=http://127.0.0.1:8265}"
export RAY_API_SERVER_ADDRESS
# Since Ray 2.60 a cluster asks for a token if its user has one, which `ray job` sends only if it is told to.
if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -f "$HOME/.ray/auth_token" ]; then
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
fi
