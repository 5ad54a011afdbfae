"""The page at /replicas: the replicas of a deployment, a line each."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Slipstream replicas</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px system-ui, sans-serif; margin: 2rem; color: #222; background: #fff }
table { border-collapse: collapse } th, td { padding: .35rem .8rem; text-align: right }
th { font-weight: 600; border-bottom: 1px solid #bbb } td:first-child, th:first-child { text-align: left }
.ready { color: #176e2c } .draining { color: #8a5a00 } .silent { color: #a11 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } th { border-color: #555 }
.ready { color: #6fcf87 } .draining { color: #e0b050 } .silent { color: #ff7a7a } }
</style></head><body>
<h1>Replicas</h1><p id="all" aria-live="polite">…</p>
<table><thead><tr><th>replica<th>health<th>load<th>capacity<th>waiting<th>cache<th>tokens/s<th>tokens/pass
<th>accepted<th>prompts cached<th>preemptions<th>given<th>heard</tr></thead><tbody id="rows"></tbody></table>
<p><a href="dashboard">Dashboard</a> · <a href="metrics">metrics</a></p>
<script>
const key = new URLSearchParams(location.hash.slice(1)).get("key");
const cell = (row, text, name) => { const c = row.insertCell(); c.textContent = text; if (name) c.className = name };
const share = (part, all) => all ? Math.round(100 * part / all) + " %" : "–";
async function show() {
  try {
    const answer = await fetch("replicas/data", key ? {headers: {Authorization: "Bearer " + key}} : {});
    if (!answer.ok) throw new Error(answer.status === 401 ? "add #key=KEY to the address" : answer.statusText);
    const data = await answer.json(), rows = document.getElementById("rows");
    rows.replaceChildren();
    for (const r of data.replicas) {
      const row = rows.insertRow();
      cell(row, r.replica); cell(row, r.health, r.health); cell(row, r.load); cell(row, r.capacity);
      cell(row, r.waiting); cell(row, Math.round(100 * r.cache_usage) + " %"); cell(row, r.tokens_per_s);
      cell(row, r.acceptance_length);
      const n = r.counts;
      cell(row, share(n.num_accepted_tokens, n.num_draft_tokens));
      cell(row, share(n.num_cached_tokens, n.num_prompt_tokens));
      cell(row, n.num_preemptions); cell(row, r.given); cell(row, r.heard_s_ago + " s ago");
    }
    const c = data.counts, hits = c.prompt_blocks ? Math.round(100 * c.known_blocks / c.prompt_blocks) : 0;
    document.getElementById("all").textContent = data.under_way + " requests under way, " + data.queued +
      " answers wait; " + c.moved + " moved, " + c.failed + " failed; " + hits + " % of prompt blocks were cached";
  } catch (error) { document.getElementById("all").textContent = "no figures: " + error.message }
}
show(); setInterval(show, 1000);
</script></body></html>
"""
