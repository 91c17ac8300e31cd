//! Attention by its operation. Formulas that become it are in `attended.rs`.

use ddp_kernels::ops;

use super::operation::*;
use super::scope::Scope;

impl Scope<'_> {
    /// Attention of (B, T, (H + 2K)·D), whose columns are those of queries, then keys, then values.
    #[track_caller]
    pub fn attention(&mut self, qkv: &Var, attention: ops::Attention) -> Var {
        let (heads, time) = (attention.heads, attention.time);
        let columns = (heads + 2 * attention.kv_heads) * attention.head_size;
        let shape = qkv.shape();
        if shape.len() != 3 || shape[1..] != [time, columns] {
            let expected =
                format!("[rows, {time}, {columns}]: queries, keys and values of all heads");
            let help = "make them with one linear layer";
            return qkv.refuse("attention", &[qkv], &expected, help);
        }
        if self.trace.borrow().hides_rows && !qkv.has_rows() {
            let help = "make queries, keys and values of the input: attention is between tokens of its rows";
            return qkv.refuse("attention", &[qkv], "a value with rows", help);
        }
        if attention.window == Some(0) {
            let help = "count the token itself, or leave the window out";
            return qkv.refuse("attention", &[qkv], "a window of at least 1 token", help);
        }
        let begins = self.trace.borrow().begins.map(|id| qkv.at(id));
        let tokens = begins.as_ref().map(|it| it.inputs()[0].shape()[1]);
        if tokens.is_some_and(|tokens| tokens != time) {
            let help = "give each document its own row, or add no tokens";
            let expected = "as many tokens as the input has, whose documents begin there";
            return qkv.refuse("attention", &[qkv], expected, help);
        }
        let inputs: Vec<&Var> = [qkv].into_iter().chain(&begins).collect();
        let output = vec![shape[0], time, heads * attention.head_size];
        qkv.push(Attention(attention), &inputs, output)
    }
}

impl Attention {
    /// Whether it is this for `time` tokens, causal, of a whole row. A few tokens do not fill a
    /// window, so it gets that of the row.
    pub(super) fn decodes_as(&mut self, whole: &Attention, time: usize) -> bool {
        let filled = |it: &ops::Attention| it.window.filter(|window| *window < time);
        let [of_whole, of_own] = [whole.0, self.0].map(|it| ops::Attention {
            time,
            causal: it.causal || time == 1,
            window: filled(&it),
            ..it
        });
        let is_same = whole.0.causal && self.0.time == time && of_whole == of_own;
        if is_same {
            self.0 = ops::Attention { time, ..whole.0 };
        }
        is_same
    }
}

impl Operation for Attention {
    fn part(&self, shape: &[usize]) -> Option<(NumberKind, Vec<usize>)> {
        Some((
            NumberKind::SumDtype,
            vec![shape[0] * self.0.heads, shape[1]],
        ))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let sums = at.y.at(at.y.id + 1);
        let inputs: Vec<&Var> = [at.d, at.y, &sums].into_iter().chain(at.x).collect();
        let mut all = vec![None; at.x.len()];
        all[0] = at.like(0, AttentionBackward(self.0), &inputs);
        all
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (mixed, qkv) = (r.take_rows(0)?, r.rows(0)?);
        let Some(cache) = r.pass.cache() else {
            let (sums, begins) = (r.take(1)?, r.x.get(1).copied());
            return Ok(ops::attention_into(&mixed, &sums, &qkv, begins, &self.0)?);
        };
        let (new, columns) = (qkv.shape()[0], self.0.kv_heads * self.0.head_size);
        let time = cache.tokens + new;
        let kept = cache.next(new, 2 * columns, qkv.dtype())?;
        let attention = ops::Attention { time, ..self.0 };
        Ok(ops::attention_cached_into(&mixed, &kept, &qkv, &attention)?)
    }
}

impl Operation for AttentionBackward {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (dqkv, sums) = (r.take_rows(0)?, r.x[2]);
        let delta = r.pass.take_as(sums.shape(), sums.dtype())?;
        let (of, qkv) = ([&r.rows(0)?, &r.rows(1)?], r.rows(3)?);
        let begins = r.x.get(4).copied();
        ops::attention_backward_into(&dqkv, &delta, of, sums, &qkv, begins, &self.0)?;
        Ok(())
    }
}
