# Asks the driver of a node (or of a container) about its GPUs; bash, for nodes without python.
# Prints sections: "@gpus", rows, "@rc N"; "@apps", rows, "@rc N"; "@pid N" with the facts of /proc.
# Queries only the fields needed: some drivers hang on the wider ones. A hung driver is left after
# 10 s, so that no probe piles up behind it.
command -v nvidia-smi >/dev/null || { echo '@none'; exit 0; }
smi() { timeout -k 2 10 nvidia-smi "$@" --format=csv,noheader,nounits </dev/null 2>&1; }
echo '@gpus'
smi --query-gpu=index,uuid,name,memory.used,memory.total,utilization.gpu
rc=$?
printf '\n@rc %d\n' "$rc"
case $rc in 124|137) exit 0;; esac
apps=$(smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory)
printf '@apps\n%s\n@rc %d\n' "$apps" "$?"
printf '%s\n' "$apps" | awk -F, '$2 ~ /^ *[0-9]+ *$/ { print $2 + 0 }' | sort -un | head -n 200 |
while read -r pid; do
    [ -d "/proc/$pid" ] || continue
    printf '@pid %d\n' "$pid"
    stat -c '%U' "/proc/$pid" 2>/dev/null || echo '?'
    ps -o etimes= -p "$pid" 2>/dev/null || echo '?'
    grep -aoE '/lxc/[0-9]+' "/proc/$pid/cgroup" 2>/dev/null | head -n 1 || true
    printf '@cmd '
    head -c 2000 "/proc/$pid/cmdline" 2>/dev/null | tr '\0\n' '  '
    printf '\n'
done
