-- each forecast of a loss beside that of the model which was trained in its size, if any; `inside`: it lies in the 95 % interval
-- needs: artifacts, lineage, metrics
with numbers as (pivot (select artifact, name, value from metrics where stage in ('choose_size', 'pretrain'))
    on name in ('predicted_loss', 'predicted_loss_low', 'predicted_loss_high', 'flops', 'tokens', 'trained_tokens', 'validation_loss',
      'measured_loss', 'validation_tokens')
    using first(value) group by artifact),
  sized as (
    select a.created_at, n.*, (
      select any_value(t.data_digest) from lineage l join lineage p on p.artifact = l.input and p.name = 'ladders'
      join lineage t on t.artifact = p.input and t.name = 'tokens' where l.artifact = a.artifact and l.name = 'law') as read
    from artifacts a join numbers n using (artifact) where a.stage = 'choose_size'),
  trained as (
    select a.created_at, n.*, t.data_digest as read, s.input as size from artifacts a join numbers n using (artifact)
    join lineage t on t.artifact = a.artifact and t.name = 'tokens' left join lineage s on s.artifact = a.artifact and s.name = 'size'
    where a.stage = 'pretrain')
  -- A training run belongs to a forecast if it took the size as an input; or if it read the ladder's tokens, and the logarithms of its
  -- FLOPs and tokens differ by less than 0.1. Its loss is null if it is not of as many held-out tokens as the forecast. Of runs that took
  -- the size and have the same loss after the first phase, such as a model and its controls, only the earliest is an outcome.
  select s.artifact as forecast, s.predicted_loss as predicted, s.predicted_loss_low as low, s.predicted_loss_high as high, s.flops,
    s.tokens, t.artifact as model, coalesce(t.measured_loss,
      case when t.validation_tokens = s.validation_tokens then t.validation_loss end) as measured, measured between low and high as inside
  from sized s left join trained t on t.size = s.artifact
    or (t.read = s.read and abs(ln(t.flops / s.flops)) < 0.1 and abs(ln(t.trained_tokens / s.tokens)) < 0.1)
  qualify t.size is null or t.measured_loss is null
    or row_number() over (partition by s.artifact, t.size, t.measured_loss order by t.created_at, t.artifact) = 1
  order by s.created_at, s.artifact, t.artifact
