//! SGD: `torch.optim.SGD`, with dampening 0.

use ddp_kernels::ops::{self, SgdConstants, SgdScalars, UpdateTensors};

use super::rule::{ArenaPart, Declared, Method, Rule, Update, check_range};
use crate::error::{Error, Result};

pub(super) const DECLARED: Declared = Declared {
    defaults: &[
        ("lr", 0.1),
        ("weight-decay", 0.0),
        ("momentum", 0.9),
        ("nesterov", 0.0),
    ],
    above_zero: &[],
    rule: |of| {
        Rule::of(Method::Sgd(SgdConstants {
            momentum: of("momentum"),
            nesterov: of("nesterov") != 0.0,
        }))
    },
};

/// The moment of SGD and Muon.
pub(super) const MOMENTUM: &str = "momentum_buffer";

impl Update for SgdConstants {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn moments(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 {
            return &[MOMENTUM];
        }
        &[]
    }

    fn check(&self) -> Result<()> {
        if self.nesterov && self.momentum == 0.0 {
            return Err(Error::Usage(
                "Nesterov's momentum: expected a momentum above 0, got 0; help: give one, such as 0.9".into(),
            ));
        }
        check_range("momentum", self.momentum, f64::INFINITY)
    }

    fn numbers(&self, _step: u64, learning_rate: f64, weight_decay: f64) -> Result<[f64; 4]> {
        let scalars = SgdScalars {
            learning_rate,
            weight_decay,
        };
        // Checked in f32, sent in f64.
        scalars.to_array()?;
        Ok([learning_rate, weight_decay, 0.0, 0.0])
    }

    fn apply(&self, part: &ArenaPart<'_>) -> Result<()> {
        let has_momentum = self.momentum > 0.0;
        let momentum = has_momentum.then(|| (part.moment)(MOMENTUM)).transpose()?;
        let of = UpdateTensors {
            scalars: &part.tensors.scalars.slice(0..2)?,
            ..part.tensors
        };
        Ok(ops::sgd(&of, momentum.as_ref(), self)?)
    }
}
