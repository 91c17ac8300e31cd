//! All files of kernels of operations. Chains are not among them: their text follows from a model.

use super::{
    activation, adamw, arithmetic, attention, cast, copy, create, cross_entropy, digest, dropout,
    embedding, gather, linear, mse, muon, norm, rope, sgd, step, sum, unfold,
};
use crate::launch::CuFile;

/// Those that take longest to compile first.
pub(crate) static SOURCES: [&CuFile; 27] = [
    &attention::gpu::TENSOR,
    &attention::gpu::PLAIN,
    &norm::SOURCE,
    &cross_entropy::SOURCE,
    &linear::gpu::SOURCE,
    &arithmetic::SOURCE,
    &cast::SOURCE,
    &activation::ACTIVATION,
    &activation::SWIGLU,
    &adamw::SOURCE,
    &copy::SOURCE,
    &create::FILL,
    &create::RANDOM,
    &digest::SOURCE,
    &dropout::SOURCE,
    &embedding::SOURCE,
    &gather::SOURCE,
    &mse::SOURCE,
    &muon::SOURCE,
    &rope::SOURCE,
    &sgd::SOURCE,
    &step::GRAD_NORM,
    &step::NONFINITE,
    &step::VOTE_STOPPED,
    &sum::ADD_IN_ORDER,
    &sum::SUM,
    &unfold::SOURCE,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::SOURCES;

    #[test]
    fn every_file_of_kernels_is_listed() {
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops")).unwrap();
        let names = folder.map(|it| it.unwrap().file_name().into_string().unwrap());
        // Chains are compiled as a model needs them, progress with the graphs that report it.
        let others = ["chain.cu", "progress.cu"];
        let files = names.filter(|it| it.ends_with(".cu") && !others.contains(&&**it));
        let listed = SOURCES.map(|it| it.name().to_string());
        assert_eq!(files.collect::<BTreeSet<_>>(), BTreeSet::from(listed));
    }
}
