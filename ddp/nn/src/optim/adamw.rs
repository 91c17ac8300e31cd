//! AdamW: `torch.optim.AdamW`.

use ddp_kernels::ops::{self, AdamwConstants, AdamwScalars};

use super::rule::{ArenaPart, Decayed, Declared, Method, Rule, SettingOf, Update, check_range};
use crate::error::Result;

pub(super) const DECLARED: Declared = Declared {
    defaults: &[
        ("lr", 1e-3),
        ("weight-decay", 0.01),
        ("beta1", 0.9),
        ("beta2", 0.999),
        ("eps", 1e-8),
    ],
    above_zero: &[],
    rule: |of| Rule::of(method(of)),
};

/// AdamW with these settings.
pub(super) fn method(of: SettingOf<'_>) -> Method {
    Method::AdamW(AdamwConstants {
        beta1: of("beta1"),
        beta2: of("beta2"),
        epsilon: of("eps"),
    })
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
        Rule {
            weight_decay: adamw.weight_decay,
            decayed: adamw.decayed,
            ..Rule::of(Method::AdamW(adamw.constants))
        }
    }
}

impl Update for AdamwConstants {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn moments(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn check(&self) -> Result<()> {
        check_range("beta1", self.beta1, 1.0)?;
        check_range("beta2", self.beta2, 1.0)?;
        check_range("epsilon", self.epsilon, f64::INFINITY)
    }

    fn numbers(&self, step: u64, learning_rate: f64, weight_decay: f64) -> Result<[f64; 4]> {
        let scalars = AdamwScalars {
            learning_rate,
            weight_decay,
            step,
        };
        Ok(scalars.to_array_f64(self)?)
    }

    fn apply(&self, part: &ArenaPart<'_>) -> Result<()> {
        let moments = [&(part.moment)("exp_avg")?, &(part.moment)("exp_avg_sq")?];
        Ok(ops::adamw(&part.tensors, moments, self)?)
    }
}
