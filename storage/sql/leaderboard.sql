-- models by task and metric, best first; `behind`: mean difference from the best on the same questions, `error` its standard error
-- needs: task_scores, scores, artifacts, lineage, aliases
with newest as (
    select t.*, l.input as model_key, coalesce((select min(alias) from aliases n where n.artifact = l.input), left(l.input, 12)) as model,
      t.metric in ('word_perplexity', 'byte_perplexity', 'bits_per_byte') as lower
    from (select * from task_scores union all by name  -- evaluations of earlier releases lack these columns
      select null::double as calibration_error, null::double as contaminated, null::double as clean where false) t
    join lineage l on l.artifact = t.artifact and l.name = 'model' join artifacts a on a.artifact = t.artifact
    qualify row_number() over (
      partition by l.input, t.task, t.metric, t.content, t.shots, t.format, t.seed, t.n order by a.created_at desc, t.artifact) = 1),
  ranked as (
    select *, rank() over same as rank, first(artifact) over same as best from newest
    window same as (partition by task, metric, content, shots, format order by case when lower then -value else value end desc)),
  behind as (
    select r.artifact, r.task, r.metric, avg(x.value - y.value) as behind, stddev_samp(x.value - y.value) / sqrt(count(*)) as error
    from ranked r join scores x on x.artifact = r.artifact and x.name = r.task || '/' || r.metric
    join scores y on y.artifact = r.best and y.name = x.name and y.id = x.id where not r.lower group by all)
  select task, metric, rank, model, value, low, high, b.behind, b.error, calibration_error, contaminated,
    clean, n, shots, format, version, seed, seconds, model_key, artifact
  from ranked left join behind b using (artifact, task, metric) order by task, metric, content, shots, format, rank, model
