//! Decoding: a model of tokens generates one token after another. Its forward is that of training,
//! but gets only new tokens; attention finds the keys and values of earlier ones in a `Cache`. Each
//! row is computed independently, so a text has the same bits however many tokens are given at a
//! time.

use ddp_kernels::{DType, Device, Tensor};

use crate::build::ParamId;
use crate::error::{Error, Result};
use crate::forward::COMBINES_TOKENS;
use crate::models::Model;
use crate::pass::{Pass, PassOptions, Saved};
use crate::scratch::{Cache, Scratch};

/// A model on the CPU that continues one text.
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Model,
    cache: Cache,
    scratch: Scratch,
    saved: Saved,
    /// i64 (2): the position of random numbers, which only training draws.
    position: Tensor,
}

impl<'a> Decoder<'a> {
    /// A decoder of at most `room` tokens, which the model's context must hold.
    pub fn new(model: &'a Model, room: usize) -> Result<Decoder<'a>> {
        let refused =
            |expected: String, got: String, help: &str| Error::model("model", expected, got, help);
        let device = model.params.device();
        let &[context] = &model.input_shape[..] else {
            let got = format!("{:?}", model.input_shape);
            return Err(refused("rows of tokens".into(), got, "give a transformer"));
        };
        if device != Device::Cpu {
            let help = "copy the model to the CPU to generate";
            return Err(refused(
                "a model on the CPU".into(),
                device.to_string(),
                help,
            ));
        }
        if room > context {
            let expected = format!("at most {context} tokens, the context");
            return Err(refused(expected, room.to_string(), "give fewer"));
        }
        let mut decoder = Decoder {
            model,
            cache: Cache::new(room),
            scratch: Scratch::new(device),
            saved: Saved::default(),
            position: Tensor::zeros(&[2], DType::I64, device)?,
        };
        decoder.check()?;
        Ok(decoder)
    }

    /// Refuses a model that mixes tokens otherwise than by the attention that finds earlier ones.
    fn check(&mut self) -> Result<()> {
        let vocabulary = self.next(&[0])?.len() as i64;
        // A formula may compare tokens, often with 0: one text has a 0, the other none. It may
        // combine a token with one four before it. Longer texts would delay the start of a large
        // model.
        for tokens in [&[1, 2, 0, 4, 5][..], &[3, 1, 2]] {
            let tokens: Vec<i64> = tokens.iter().map(|token| token % vocabulary).collect();
            let tokens = &tokens[..self.cache.room.min(tokens.len())];
            self.restart();
            let mut one_by_one = Vec::new();
            for token in tokens {
                one_by_one = self.next(&[*token])?;
            }
            self.restart();
            let at_once = self.next(tokens)?;
            let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            if !one_by_one.iter().zip(&at_once).all(is_same) {
                return Err(Error::model(
                    "model",
                    "the same logits where tokens come one by one and at once",
                    "others",
                    COMBINES_TOKENS,
                ));
            }
        }
        self.restart();
        Ok(())
    }

    /// Forgets all tokens.
    pub fn restart(&mut self) {
        self.cache = Cache::new(self.cache.room);
    }

    /// Tokens that still fit.
    pub fn room(&self) -> usize {
        self.cache.room - self.cache.tokens
    }

    /// The logits of the token after `tokens`, which follow those of earlier calls.
    pub fn next(&mut self, tokens: &[i64]) -> Result<Vec<f32>> {
        let x = Tensor::from_slice(tokens, &[1, tokens.len()], Device::Cpu)?;
        let options = PassOptions {
            training: false,
            accumulate: false,
            last: true,
            seed: 0,
            position: &self.position,
        };
        let mut ignored = |_: ParamId| Ok(());
        let params = &self.model.params;
        self.cache.next = 0;
        let (scratch, saved) = (&mut self.scratch, &mut self.saved);
        let pass = Pass::new(params, scratch, saved, options, &mut ignored);
        let logits = self.model.forward(&mut pass.after(&mut self.cache), &x)?;
        self.cache.tokens += tokens.len();
        let all: Vec<f32> = logits.to_dtype(DType::F32)?.to_vec()?;
        // A `Head` gives those of the last token alone.
        let classes = self.model.output_shape.last().copied().unwrap_or(0);
        Ok(all[all.len().saturating_sub(classes)..].to_vec())
    }
}

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 takes the most probable token.
    pub temperature: f64,
    /// Only this many tokens, the most probable ones; None for all.
    pub top_k: Option<usize>,
    /// Only the most probable tokens whose probabilities add up to this.
    pub top_p: f64,
}

impl Sampling {
    /// A token by its logits; None if one of these is NaN or +∞. `uniform` is a random number in
    /// [0, 1). Of equal logits the first counts as more probable. A logit of −∞ is never chosen.
    pub fn choose(&self, logits: &[f32], uniform: f64) -> Option<usize> {
        let mut best = (0, f32::NEG_INFINITY);
        for (token, &logit) in logits.iter().enumerate() {
            if logit.is_nan() || logit == f32::INFINITY {
                return None;
            }
            best = if logit > best.1 { (token, logit) } else { best };
        }
        if self.temperature == 0.0 || self.top_k == Some(1) {
            return Some(best.0);
        }
        let weight = |logit: f32| (f64::from(logit - best.1) / self.temperature).exp();
        let all = logits.iter().enumerate();
        let all = all.map(|(token, &logit)| (token, weight(logit)));
        let mut left: Vec<(usize, f64)> = all.filter(|(_, weight)| *weight > 0.0).collect();
        let more_probable_first =
            |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(count) = self.top_k.filter(|count| *count < left.len()) {
            left.select_nth_unstable_by(count - 1, more_probable_first);
            left.truncate(count);
        }
        let sum = |left: &[(usize, f64)]| left.iter().map(|(_, weight)| weight).sum::<f64>();
        left.sort_unstable_by(more_probable_first);
        if self.top_p < 1.0 {
            let wanted = self.top_p * sum(&left);
            let mut so_far = 0.0;
            let reaches = left.iter().position(|(_, weight)| {
                so_far += weight;
                so_far >= wanted
            });
            left.truncate(reaches.map_or(left.len(), |last| last + 1));
        }
        let mut rest = uniform * sum(&left);
        let chosen = left.iter().find(|(_, weight)| {
            rest -= weight;
            rest < 0.0
        });
        // Rounding may leave a rest.
        Some(chosen.or(left.last()).map_or(best.0, |(token, _)| *token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Init, Linear, Module, Scope, SelfAttention, Var};

    /// A model whose tokens depend on earlier ones through a mean.
    #[derive(Debug)]
    struct Mean;

    impl Module for Mean {
        fn forward(&self, m: &mut Scope<'_>, tokens: &Var) -> Var {
            let x = m.embedding("tokens", tokens, 5, 4);
            let x = &x + x.mean(1);
            m.linear("out", &x, 5)
        }

        fn input_dtype(&self) -> Option<DType> {
            Some(DType::I64)
        }
    }

    #[test]
    fn a_model_that_mixes_tokens_without_attention_is_refused() {
        let model = Model::new(Box::new(Mean), &[6], DType::F32, Device::Cpu, 1, &|_| false);
        let model = model.unwrap();
        for room in [1, 6] {
            let error = Decoder::new(&model, room).unwrap_err().to_string();
            assert!(error.contains("combine tokens only by"), "{error}");
        }
    }

    /// Layers of a transformer and a last linear one, which gives the logits of all its tokens.
    #[derive(Debug)]
    enum Attends {
        Layers(Vec<Option<usize>>),
        Formulas(Vec<Mask>),
        /// And multiplies the third token and later ones by other numbers.
        Place,
        /// And adds a row for each place of the context.
        Table,
    }

    /// Of scores among so many tokens.
    type Mask = fn(m: &mut Scope<'_>, scores: Var, time: usize) -> Var;

    /// A token sees the last `window` ones.
    fn near(m: &mut Scope<'_>, scores: &Var, time: usize, window: usize) -> Var {
        let sees = |at: usize| at % time <= at / time && at / time < at % time + window;
        let shows: Vec<f64> = (0..time * time)
            .map(|at| f64::from(u8::from(sees(at))))
            .collect();
        let shows = m.numbers(&shows, &[time, time]);
        shows.select(scores, &scores.number(f64::NEG_INFINITY))
    }

    /// Hides later tokens.
    fn later(m: &mut Scope<'_>, time: usize) -> Var {
        let at = m.indices(time);
        at.reshape(&[time, 1]).less(&at) * -1e9
    }

    /// Hides the token that is so far before each.
    fn but(m: &mut Scope<'_>, time: usize, before: usize) -> Var {
        let at = m.indices(time);
        let is_it = at.reshape(&[time, 1]).equal(&(at + before as f64));
        is_it.select(&is_it.number(-1e9), &is_it.number(0.0))
    }

    impl Module for Attends {
        fn forward(&self, m: &mut Scope<'_>, tokens: &Var) -> Var {
            let time = tokens.size(1);
            let x = m.embedding("tokens", tokens, 5, 4);
            let mut x = x;
            match self {
                Attends::Layers(windows) => {
                    for (index, window) in windows.iter().enumerate() {
                        let all = SelfAttention::causal(4, 2, 2, [&Linear::new; 2]);
                        let layer = match window {
                            Some(window) => all.windowed(*window),
                            None => all,
                        };
                        x = &x + m.layer(&index.to_string(), &x, layer);
                    }
                }
                Attends::Formulas(masks) => {
                    for (index, mask) in masks.iter().enumerate() {
                        let qkv = m.linear(&format!("{index}.qkv"), &x, 12);
                        let parts = qkv.split(-1, &[4; 3]);
                        let of_heads = |it: &Var| it.reshape(&[time, 2, 2]).permute(&[0, 2, 1, 3]);
                        let [q, k, v] = [0, 1, 2].map(|at| of_heads(&parts[at]));
                        let scores = q.matmul(&k.transpose(-1, -2)) / 2f64.sqrt();
                        let scores = mask(m, scores, time);
                        let mixed = scores.softmax(-1).matmul(&v).permute(&[0, 2, 1, 3]);
                        let mixed = mixed.reshape(&[time, 4]);
                        x = &x + m.linear(&format!("{index}.out"), &mixed, 4);
                    }
                }
                Attends::Table => {
                    x = &x + m.parameter("places", &[6, 4], Init::Constant(0.5));
                    let layer = SelfAttention::causal(4, 2, 2, [&Linear::new; 2]);
                    x = &x + m.layer("attention", &x, layer);
                }
                Attends::Place => {
                    let places: Vec<f64> = (0..time).map(|at| at.max(2) as f64).collect();
                    x = &x * m.numbers(&places, &[time, 1]);
                }
            }
            m.layer("out", &x, Linear::new(5).without_bias())
        }

        fn input_dtype(&self) -> Option<DType> {
            Some(DType::I64)
        }
    }

    fn attends(how: Attends) -> Model {
        Model::new(Box::new(how), &[6], DType::F32, Device::Cpu, 1, &|_| false).unwrap()
    }

    #[test]
    fn a_model_that_ends_in_any_linear_layer_and_ones_with_attention_by_a_formula_generate() {
        let all: Mask = |m, x, time| near(m, &x, time, 9);
        let two: Mask = |m, x, time| near(m, &x, time, 2);
        let five: Mask = |m, x, time| near(m, &x, time, 5);
        let ways = [
            Attends::Layers(vec![None]),
            Attends::Formulas(vec![all]),
            Attends::Formulas(vec![two]),
            Attends::Formulas(vec![five]),
            Attends::Layers(vec![Some(9)]),
            Attends::Layers(vec![Some(2)]),
            Attends::Layers(vec![Some(5)]),
            Attends::Formulas(vec![all, two, five, two]),
            Attends::Layers(vec![None, Some(2), Some(5), Some(2)]),
        ];
        let texts = ways.map(|how| {
            let model = attends(how);
            let mut decoder = Decoder::new(&model, 6).unwrap();
            let tokens = [1, 4, 2, 0, 3, 1];
            let at_once = decoder.next(&tokens).unwrap();
            decoder.restart();
            let one_by_one = tokens.map(|token| decoder.next(&[token]).unwrap());
            assert_eq!((at_once.len(), &at_once), (5, &one_by_one[5]));
            assert_ne!(one_by_one[0], one_by_one[5]);
            decoder.restart();
            decoder.next(&tokens[..2]).unwrap();
            assert_eq!(decoder.next(&tokens[2..]).unwrap(), at_once);
            one_by_one
        });
        assert_eq!(texts[0], texts[1]);
        assert_eq!(texts[1..4], texts[4..7]);
        assert_eq!(texts[7], texts[8]);
        // A window differs from where it is full.
        for (text, window) in [(&texts[2], 2), (&texts[3], 5)] {
            assert_eq!(text[..window], texts[0][..window]);
            assert_ne!(text[window], texts[0][window]);
        }
    }

    /// Some look causal among few tokens.
    #[test]
    fn a_model_with_another_mask_or_numbers_by_place_is_refused() {
        let others = "to have a mask that hides all later tokens";
        let place = "expected numbers that depend neither on the place of a token";
        let masks: [(&str, Mask); 4] = [
            (others, |_, x, _| x),
            (place, |m, x, time| near(m, &(x / time as f64), time, 9)),
            // Without the one before, and without the one four before: causal for one token, or
            // four.
            (place, |m, x, time| x + later(m, time) + but(m, time, 1)),
            (others, |m, x, time| x + (later(m, time) + but(m, time, 4))),
        ];
        for (expected, mask) in masks {
            let model = attends(Attends::Formulas(vec![mask]));
            let error = Decoder::new(&model, 6).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for how in [Attends::Place, Attends::Table] {
            let error = Decoder::new(&attends(how), 3).unwrap_err();
            assert!(error.to_string().contains(place), "{error}");
        }
    }

    const LOGITS: [f32; 6] = [1.0, f32::NEG_INFINITY, 3.0, 3.0, 0.0, 2.0];

    fn sampling(temperature: f64, top_k: Option<usize>, top_p: f64) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
        }
    }

    /// How often each token is chosen, of 10 000 evenly spaced random numbers.
    fn counts(sampling: Sampling) -> [usize; 6] {
        let mut counts = [0; 6];
        for index in 0..10_000 {
            counts[sampling.choose(&LOGITS, f64::from(index) / 1e4).unwrap()] += 1;
        }
        counts
    }

    #[test]
    fn tokens_are_chosen_as_often_as_their_probability_says() {
        let greedy = [0, 0, 10_000, 0, 0, 0];
        assert_eq!(counts(sampling(0.0, None, 1.0)), greedy);
        assert_eq!(counts(sampling(1.0, Some(1), 1.0)), greedy);
        // Weights e^(2·logit), added up: what softmax gives at temperature 0.5.
        let weights = LOGITS.map(|logit| (2.0 * f64::from(logit)).exp());
        let sum: f64 = weights.iter().sum();
        let counted = counts(sampling(0.5, None, 1.0));
        for (count, weight) in counted.into_iter().zip(weights) {
            assert!(
                (count as f64 - 1e4 * weight / sum).abs() <= 1.0,
                "{counted:?}"
            );
        }
        assert_eq!(
            counts(sampling(1.0, Some(2), 1.0)),
            [0, 0, 5000, 5000, 0, 0]
        );
        // Two tokens have 0.73 of the probability, three 0.91.
        assert_eq!(counts(sampling(1.0, None, 0.73)), [0, 0, 5000, 5000, 0, 0]);
        let three = counts(sampling(1.0, None, 0.9));
        assert!(three[5] > 1000 && three[0] == 0, "{three:?}");
        assert_eq!(counts(sampling(1.0, None, 1e-9)), greedy);
        assert_eq!(
            counts(sampling(1e-300, None, 1.0)),
            [0, 0, 5000, 5000, 0, 0]
        );
        assert_eq!(counts(sampling(1e300, Some(99), 1.0))[1], 0);
    }

    #[test]
    fn logits_that_are_not_finite_choose_nothing() {
        for bad in [f32::NAN, f32::INFINITY] {
            for temperature in [0.0, 1.0] {
                let chosen = sampling(temperature, None, 1.0).choose(&[0.0, bad], 0.5);
                assert_eq!(chosen, None);
            }
        }
    }
}
