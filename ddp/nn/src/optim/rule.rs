//! Update rules and their constants, and which method a rule uses for which parameter.

use ddp_kernels::choices;
use ddp_kernels::ops::{AdamwConstants, AdamwScalars, SgdConstants, SgdScalars};

use crate::error::{Error, Result};
use crate::params::Parameter;

choices! {
    /// What weight decay applies to.
    #[derive(Default)]
    pub enum Decayed {
        /// Matrices, but not biases and other vectors
        #[default]
        Matrices = "matrices",
        /// All parameters, as in PyTorch's optimizers
        All = "all",
    }
}

/// An update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `torch.optim.AdamW`.
    AdamW {
        /// β₁, β₂ and ε.
        constants: AdamwConstants,
        /// The decay, which is multiplied by the learning rate.
        weight_decay: f64,
        /// What decays.
        decayed: Decayed,
    },
    /// `torch.optim.SGD`, with dampening 0.
    Sgd {
        /// The momentum, and whether it is Nesterov's.
        constants: SgdConstants,
        /// The part of each value that is added to its gradient.
        weight_decay: f64,
        /// What decays.
        decayed: Decayed,
    },
    /// Muon for the matrices of hidden layers, AdamW for all other parameters.
    Muon {
        /// The momentum, and whether it is Nesterov's.
        constants: SgdConstants,
        /// β₁, β₂ and ε of the other parameters.
        adamw: AdamwConstants,
        /// The learning rate of the other parameters, as a factor of that of the matrices.
        adamw_rate: f64,
        /// The decay, which is multiplied by the learning rate.
        weight_decay: f64,
        /// What decays.
        decayed: Decayed,
    },
}

/// AdamW with PyTorch's defaults, but only matrices decay: a [`Rule`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// β₁, β₂ and ε.
    pub constants: AdamwConstants,
    /// The decay, which is multiplied by the learning rate.
    pub weight_decay: f64,
    /// What decays.
    pub decayed: Decayed,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            constants: AdamwConstants::default(),
            weight_decay: 0.01,
            decayed: Decayed::Matrices,
        }
    }
}

impl From<AdamW> for Rule {
    fn from(adamw: AdamW) -> Rule {
        let AdamW {
            constants,
            weight_decay,
            decayed,
        } = adamw;
        Rule::AdamW {
            constants,
            weight_decay,
            decayed,
        }
    }
}

/// How one parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Method {
    AdamW(AdamwConstants),
    Sgd(SgdConstants),
    Muon(SgdConstants),
}

impl Rule {
    /// AdamW with PyTorch's defaults, but only matrices decay.
    pub fn adamw() -> Rule {
        AdamW::default().into()
    }

    /// SGD with this momentum and no weight decay.
    pub fn sgd(momentum: f64) -> Rule {
        Rule::Sgd {
            constants: SgdConstants {
                momentum,
                nesterov: false,
            },
            weight_decay: 0.0,
            decayed: Decayed::Matrices,
        }
    }

    /// Muon with Nesterov's momentum 0.95, and the same learning rate for AdamW.
    pub fn muon() -> Rule {
        Rule::Muon {
            constants: SgdConstants {
                momentum: 0.95,
                nesterov: true,
            },
            adamw: AdamwConstants {
                beta2: 0.95,
                epsilon: 1e-10,
                ..AdamwConstants::default()
            },
            adamw_rate: 1.0,
            weight_decay: 0.01,
            decayed: Decayed::Matrices,
        }
    }

    /// Whether it orthogonalises matrices.
    pub fn is_muon(&self) -> bool {
        matches!(self, Rule::Muon { .. })
    }

    /// How it updates `parameter`.
    pub(super) fn method(&self, parameter: &Parameter) -> Method {
        match *self {
            Rule::AdamW { constants, .. } => Method::AdamW(constants),
            Rule::Sgd { constants, .. } => Method::Sgd(constants),
            Rule::Muon { constants, .. } if !parameter.matrices.is_empty() => {
                Method::Muon(constants)
            }
            Rule::Muon { adamw, .. } => Method::AdamW(adamw),
        }
    }

    /// The names of the moments of `parameter`, also in checkpoints: those in the state of
    /// PyTorch's optimizers.
    pub fn moments_of(&self, parameter: &Parameter) -> &'static [&'static str] {
        self.method(parameter).moment_names()
    }

    /// Elements of the moments of a model with so many `parameters`, of which `hidden` are in
    /// matrices of hidden layers.
    pub fn moment_count(&self, parameters: u64, hidden: u64) -> u64 {
        match self {
            Rule::AdamW { .. } => parameters.saturating_mul(2),
            Rule::Muon { .. } => parameters.saturating_mul(2).saturating_sub(hidden),
            Rule::Sgd { constants, .. } if constants.momentum > 0.0 => parameters,
            Rule::Sgd { .. } => 0,
        }
    }

    /// Weight decay, and what decays.
    pub(super) fn decay(&self) -> (f64, Decayed) {
        let (Rule::AdamW {
            weight_decay,
            decayed,
            ..
        }
        | Rule::Sgd {
            weight_decay,
            decayed,
            ..
        }
        | Rule::Muon {
            weight_decay,
            decayed,
            ..
        }) = *self;
        (weight_decay, decayed)
    }

    /// The factor of the learning rate of the parameters that `method` updates.
    pub(super) fn rate_of(&self, method: Method) -> f64 {
        match (self, method) {
            (Rule::Muon { adamw_rate, .. }, Method::AdamW(_)) => *adamw_rate,
            _ => 1.0,
        }
    }

    /// Refuses invalid constants.
    pub(super) fn check(&self) -> Result<()> {
        let of_adamw = |of: AdamwConstants| {
            vec![
                ("beta1", of.beta1, 1.0),
                ("beta2", of.beta2, 1.0),
                ("epsilon", of.epsilon, f64::INFINITY),
            ]
        };
        let mut ranges = match *self {
            Rule::AdamW { constants, .. } => of_adamw(constants),
            Rule::Sgd { constants, .. } => {
                if constants.nesterov && constants.momentum == 0.0 {
                    return Err(Error::Usage(
                        "Nesterov's momentum: expected a momentum above 0, got 0".into(),
                    ));
                }
                vec![("momentum", constants.momentum, f64::INFINITY)]
            }
            Rule::Muon {
                constants,
                adamw,
                adamw_rate,
                ..
            } => {
                if constants.momentum == 0.0 {
                    return Err(Error::Usage(
                        "Muon's momentum: expected a number above 0 and below 1, got 0".into(),
                    ));
                }
                let mut ranges = of_adamw(adamw);
                ranges.push(("momentum", constants.momentum, 1.0));
                ranges.push((
                    "the factor of AdamW's learning rate",
                    adamw_rate,
                    f64::INFINITY,
                ));
                ranges
            }
        };
        ranges.push(("weight decay", self.decay().0, f64::INFINITY));
        ranges
            .into_iter()
            .try_for_each(|(name, value, end)| check_range(name, value, end))
    }
}

/// Refuses a number that is not at least 0 and below `end`.
pub(super) fn check_range(name: &str, value: f64, end: f64) -> Result<()> {
    if (0.0..end).contains(&value) {
        return Ok(());
    }
    let below = if end.is_finite() {
        format!(" and below {end}")
    } else {
        String::new()
    };
    Err(Error::Usage(format!(
        "{name}: expected 0 or more{below}, got {value}"
    )))
}

impl Method {
    /// The names of its moments.
    pub(super) fn moment_names(self) -> &'static [&'static str] {
        match self {
            Method::AdamW(_) => &["exp_avg", "exp_avg_sq"],
            Method::Sgd(constants) if constants.momentum == 0.0 => &[],
            Method::Sgd(_) | Method::Muon(_) => &["momentum_buffer"],
        }
    }

    /// What its update reads in step number `step`, counted from 1.
    pub(super) fn numbers(
        self,
        step: u64,
        learning_rate: f64,
        weight_decay: f64,
    ) -> Result<[f64; 4]> {
        Ok(match self {
            Method::AdamW(constants) => AdamwScalars {
                learning_rate,
                weight_decay,
                step,
            }
            .to_array_f64(&constants)?,
            Method::Sgd(_) | Method::Muon(_) => {
                // Checked in f32, sent in f64.
                SgdScalars {
                    learning_rate,
                    weight_decay,
                }
                .to_array()?;
                [learning_rate, weight_decay, 0.0, 0.0]
            }
        })
    }
}
