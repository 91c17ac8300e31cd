//! What the rows of one cross-entropy share on the CPU, and the formulas of one row.

use crate::ops::float::Float;
use crate::ops::targets::Targets;

/// What all rows share.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a, T> {
    /// (B, C); None if they are in `dlogits`, to be overwritten.
    pub(super) logits: Option<&'a [T]>,
    /// (B)
    pub(super) targets: Targets<'a>,
    pub(super) ignore_index: Option<i64>,
    /// (C)
    pub(super) class_weights: Option<&'a [T]>,
    pub(super) classes: usize,
    /// Whether there are so few classes that sums are in their order.
    pub(super) is_narrow: bool,
    pub(super) smooths: bool,
    /// Whether correct rows are counted.
    pub(super) counts: bool,
    /// 1 − label_smoothing
    pub(super) target_share: T,
    /// label_smoothing / C
    pub(super) class_share: T,
    /// Σ class_weights
    pub(super) weight_sum: T,
    pub(super) gradient_scale: T,
}

/// The outputs of consecutive rows.
pub(super) struct Rows<'a, T> {
    /// The batch's row that comes first.
    pub(super) first: usize,
    pub(super) losses: &'a mut [T],
    pub(super) dlogits: Option<&'a mut [T]>,
    pub(super) weights: Option<&'a mut [T]>,
}

/// The factors of one row's gradient: `dx_c = softmax eᶻ_c − class w_c − target [c = y]`.
#[derive(Clone, Copy)]
pub(super) struct Factors<T> {
    pub(super) softmax: T,
    pub(super) class: T,
    pub(super) target: T,
}

impl<T: Float> Problem<'_, T> {
    #[inline(always)]
    pub(super) fn class(&self, row: usize) -> Option<usize> {
        self.targets.class(row, self.ignore_index)
    }

    #[inline(always)]
    pub(super) fn weight(&self, class: usize) -> T {
        self.class_weights.map_or(T::ONE, |weights| weights[class])
    }

    /// The loss, from ln s, z of the target, its weight, and Σ w z if labels are smoothed.
    #[inline(always)]
    pub(super) fn loss(&self, log_sum: T, target_z: T, weight: T, weighted_z: T) -> T {
        let target = self.target_share * (weight * (log_sum - target_z));
        // Without smoothing it is not added, because 0 × ∞ would be NaN. Both terms are positive,
        // so nothing cancels.
        if !self.smooths {
            return target;
        }
        let smoothed = self.weight_sum.fused(log_sum, T::ZERO - weighted_z);
        self.class_share.fused(smoothed, target)
    }

    #[inline(always)]
    pub(super) fn factors(&self, sum: T, weight: T) -> Factors<T> {
        let target = self.target_share * weight;
        let total = if self.smooths {
            self.class_share.fused(self.weight_sum, target)
        } else {
            target
        };
        Factors {
            softmax: self.gradient_scale * total / sum,
            class: self.gradient_scale * self.class_share,
            target: self.gradient_scale * target,
        }
    }

    /// eᶻ of one row becomes its gradient.
    #[inline(always)]
    pub(super) fn finish_gradient(&self, row: &mut [T], class: usize, factors: Factors<T>) {
        let elements = row.iter_mut();
        match self.class_weights {
            _ if !self.smooths => elements.for_each(|e| *e = *e * factors.softmax),
            None => elements.for_each(|e| *e = e.fused(factors.softmax, T::ZERO - factors.class)),
            Some(weights) => elements.zip(weights).for_each(|(e, &weight)| {
                *e = e.fused(factors.softmax, T::ZERO - factors.class * weight)
            }),
        }
        row[class] = row[class] - factors.target;
    }
}
