//! The metric on held-out rows that decides which evaluation is the best.

use ddp_kernels::choices;

use crate::shown::significant;

choices! {
    /// The figure of held-out rows that decides which evaluation is the best.
    #[derive(Default)]
    pub enum BestBy {
        /// The lowest loss
        #[default]
        Loss = "loss",
        /// The highest accuracy
        Accuracy = "accuracy",
        /// The highest balanced accuracy: the mean recall of the classes
        Balanced = "balanced",
        /// The highest AUC, of two classes
        Auc = "auc",
    }
}

impl BestBy {
    /// Its field in the metrics log, and its name in messages.
    pub fn names(self) -> [&'static str; 2] {
        match self {
            BestBy::Loss => ["loss"; 2],
            BestBy::Accuracy => ["accuracy"; 2],
            BestBy::Balanced => ["balanced_accuracy", "balanced accuracy"],
            BestBy::Auc => ["auc", "AUC"],
        }
    }

    /// `loss 0.3124`, `balanced accuracy 71.20%`
    pub fn text(self, value: f64) -> String {
        let [_, name] = self.names();
        match self {
            BestBy::Loss | BestBy::Auc => format!("{name} {}", significant(value, 4)),
            BestBy::Accuracy | BestBy::Balanced => format!("{name} {:.2}%", 100.0 * value),
        }
    }

    pub(crate) fn is_loss(&self) -> bool {
        *self == BestBy::Loss
    }
}
