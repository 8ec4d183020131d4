# {{summary}}
xpk workload {{verb}} --workload={{name}} --cluster={{cluster}} \
    {{devices}} --docker-image={{image}} \
    --max-restarts={{restarts}} --termination-grace-period-seconds={{grace}} \
    {{options}} \
    --command={{command}}
