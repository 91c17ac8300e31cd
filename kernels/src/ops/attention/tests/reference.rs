//! Textbook attention, in f64 and with all scores in memory, and a bound on how far rounding may
//! take other implementations.

use super::Attention;

/// What is computed, and beside each element the size of what it was added from.
pub(super) struct Reference {
    pub(super) out: Vec<[f64; 2]>,
    pub(super) log_sum_exp: Vec<[f64; 2]>,
    pub(super) dqkv: Vec<[f64; 2]>,
    /// The largest of scale · Σ |q| |k|.
    pub(super) score_max: f64,
}

impl Reference {
    /// `qkv` is packed; `begins` is empty where sequences are one document.
    pub(super) fn new(
        attention: &Attention,
        begins: &[i32],
        qkv: &[f64],
        dout: &[f64],
    ) -> Reference {
        let &Attention {
            time,
            heads,
            kv_heads,
            head_size,
            ..
        } = attention;
        let width = (heads + 2 * kv_heads) * head_size;
        let batch = qkv.len() / width / time;
        let mut reference = Reference {
            out: vec![[0.0; 2]; dout.len()],
            log_sum_exp: vec![[0.0; 2]; batch * heads * time],
            dqkv: vec![[0.0; 2]; qkv.len()],
            score_max: 0.0,
        };
        for sequence in 0..batch {
            for head in 0..heads {
                reference.head(attention, begins, [qkv, dout], (sequence, head));
            }
        }
        reference
    }

    fn head(
        &mut self,
        attention: &Attention,
        begins: &[i32],
        [qkv, dout]: [&[f64]; 2],
        (sequence, head): (usize, usize),
    ) {
        let &Attention {
            time,
            heads,
            kv_heads,
            head_size,
            causal,
            scale,
            window,
            cap,
        } = attention;
        let scale = scale.unwrap_or(1.0 / (head_size as f64).sqrt());
        let width = (heads + 2 * kv_heads) * head_size;
        let kv_head = head * kv_heads / heads;
        let at = |row: usize, first_head: usize| {
            (sequence * time + row) * width + first_head * head_size
        };
        let (q, k, v) = (
            |row| at(row, head),
            |row| at(row, heads + kv_head),
            |row| at(row, heads + kv_heads + kv_head),
        );
        let o = |row: usize| ((sequence * time + row) * heads + head) * head_size;
        for i in 0..time {
            let keys = if causal { i + 1 } else { time };
            let begin = begins
                .get(sequence * time + i)
                .map_or(0, |&begin| begin as usize);
            let first = window
                .map_or(0, |window| (i + 1).saturating_sub(window))
                .max(begin);
            let scores: Vec<f64> = (first..keys)
                .map(|j| {
                    let products = (0..head_size).map(|c| qkv[q(i) + c] * qkv[k(j) + c]);
                    let size: f64 = products.clone().map(f64::abs).sum();
                    self.score_max = self.score_max.max(scale.abs() * size);
                    let score = scale * products.sum::<f64>();
                    cap.map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            let log_sum = largest + sum.ln();
            self.log_sum_exp[(sequence * heads + head) * time + i] = [log_sum, log_sum.abs() + 1.0];
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
            for (j, &weight) in (first..).zip(&weights) {
                for c in 0..head_size {
                    add(&mut self.out[o(i) + c], weight * qkv[v(j) + c]);
                    add(&mut self.dqkv[v(j) + c], weight * dout[o(i) + c]);
                }
            }
            let out = &self.out[o(i)..o(i) + head_size];
            let dout = &dout[o(i)..o(i) + head_size];
            let delta: f64 = out.iter().zip(dout).map(|(out, dout)| out[0] * dout).sum();
            for ((j, &weight), score) in (first..).zip(&weights).zip(&scores) {
                let slope = cap.map_or(1.0, |cap| 1.0 - (score / cap).powi(2));
                let columns = || out.iter().zip(dout).zip(&qkv[v(j)..]);
                let dweight: f64 = columns().map(|((_, dout), v)| dout * v).sum();
                let size: f64 = columns()
                    .map(|((out, dout), v)| dout.abs() * (v.abs() + out[1]))
                    .sum();
                let weight = scale * weight;
                // The slope is rounded as a number near 1, also where it is small.
                let (score, size) = (weight * slope * (dweight - delta), weight.abs() * size);
                for c in 0..head_size {
                    let (to_q, to_k) = (qkv[k(j) + c], qkv[q(i) + c]);
                    let dq = &mut self.dqkv[q(i) + c];
                    *dq = [dq[0] + score * to_q, dq[1] + (size * to_q).abs()];
                    let dk = &mut self.dqkv[k(j) + c];
                    *dk = [dk[0] + score * to_k, dk[1] + (size * to_k).abs()];
                }
            }
        }
    }

    /// Every element is within the rounding errors of sums in a type whose half ulp is `epsilon`,
    /// where weights, `out` and the results are rounded to a type whose half ulp is `narrow`, or 0.
    ///
    /// A score is off by (head_size + 2) epsilon score_max, and so are twice that, relatively, the
    /// weights, once in the numerator and once in the sum. Sums over keys, queries and columns are
    /// off by an epsilon an addend, relative to the sum of sizes; each function and product adds a
    /// few. dS has the errors of a weight, of two sums over columns, and of `out`; its sizes have
    /// all of their addends. Errors of the second order are in the factor 2. A gradient is off by
    /// `narrow` four times: the weights in `out`, `out` itself, dS, and the result.
    #[track_caller]
    pub(super) fn check(&self, attention: &Attention, epsilon: f64, narrow: f64, got: [&[f64]; 3]) {
        let columns = attention.head_size as f64;
        let addends = (attention.time * attention.heads / attention.kv_heads) as f64;
        let steps = 2.0 * (columns + 2.0) * self.score_max + addends + 2.0 * columns + 20.0;
        let parts = [
            ("out", &self.out, narrow),
            ("log_sum_exp", &self.log_sum_exp, 0.0),
            ("dqkv", &self.dqkv, narrow),
        ];
        for ((what, expected, narrow), got) in parts.into_iter().zip(got) {
            assert_eq!(got.len(), expected.len());
            let relative = 2.0 * steps * epsilon + 4.0 * narrow;
            for (index, (&got, &[expected, size])) in got.iter().zip(expected).enumerate() {
                let (error, bound) = ((got - expected).abs(), relative * size);
                assert!(
                    error <= bound,
                    "{attention:?}: {what} {index} is {got:e}, not {expected:e}: {error:e} of {bound:e}"
                );
            }
        }
    }
}

/// Adds a product, and its size to the sum of sizes.
fn add(sum: &mut [f64; 2], product: f64) {
    *sum = [sum[0] + product, sum[1] + product.abs()];
}
