//! Losses and weights pinned to the bit, in tests/golden/bits.json.
//!
//! They are the same on every processor. Processors without fused multiply-add skip these tests,
//! since they compute it slowly.
//!
//! A changed bit is a changed result for every user. If the change is intended, replace the file by
//! the one that the failing test prints, and say why in CHANGELOG.md.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::job::{Ended, Folder, all_at_once};
use crate::support::metrics_log::{MetricsLog, model};

/// 3 steps of 36 rows and one of 27 in each epoch, and evaluations of 27 rows.
pub(crate) const DATA: &str = "--data synthetic:classification,rows=135,held-out=27,features=20,classes=32 \
                               --batch-size 36";

/// A transformer on a text: 3 steps of 8 windows and one of 5 in each epoch.
pub(crate) const TEXT: &str = concat!(
    "--model gpt,layers=2,heads=2,width=16,context=32 --batch-size 8 --val-split 0.2 --data ",
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/golden/text.txt"
);

/// One pinned training.
pub(crate) struct Golden {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    pub(crate) data: &'static str,
    pub(crate) flags: &'static str,
    /// Further flags, each for a separate run; all runs must give the same bits.
    pub(crate) ways: &'static [&'static str],
}

/// Runs all cases, and compares their bits with the pinned ones.
pub(crate) fn check(cases: &[Golden], run: impl Fn(&Golden, &Folder, &str) -> Ended + Sync) {
    if !has_fused_multiply_add() {
        ddp_testing::skip("the processor has no fused multiply-add");
        return;
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/bits.json");
    let text = std::fs::read_to_string(path).expect("tests/golden/bits.json can be read");
    let golden: Value = serde_json::from_str(&text).expect("tests/golden/bits.json is JSON");
    let found = std::sync::Mutex::new(BTreeMap::new());
    let runs = cases
        .iter()
        .flat_map(|case| case.ways.iter().map(move |way| (case, way)));
    all_at_once(runs, |(case, way)| {
        let folder = Folder::new("golden");
        let flags = format!("{} {} {way} --log-every 1 --out OUT", case.data, case.flags);
        run(case, &folder, &flags).assert_well();
        let bits = bits_of(&folder.metrics_log(), &folder.out());
        let mut found = found.lock().unwrap();
        let first = found.entry(case.name).or_insert_with(|| bits.clone());
        assert!(*first == bits, "{} {way}: {bits} and {first}", case.name);
    });
    let found = found.into_inner().unwrap();
    let others: Vec<String> = found
        .iter()
        .filter(|(name, found)| golden[**name] != **found)
        .map(|(name, found)| {
            let difference = difference(found, &golden[*name]);
            format!("{name}: {difference}\n  \"{name}\": {found:#}")
        })
        .collect();
    assert!(
        others.is_empty(),
        "other bits than in tests/golden/bits.json: {}",
        others.join("\n")
    );
}

/// The bits of every loss (steps, then evaluations), and a hash of the trained weights.
fn bits_of(log: &MetricsLog, out: &Path) -> Value {
    let losses: Vec<String> = log
        .losses()
        .iter()
        .map(|loss| format!("{:016x}", loss.to_bits()))
        .collect();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for (name, (shape, values)) in model(out, log.of_steps("step").len() as u64) {
        let values = values.iter().flat_map(|value| value.to_le_bytes());
        let sizes = shape.iter().flat_map(|size| size.to_le_bytes());
        for byte in name.bytes().chain(sizes).chain(values) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3); // FNV-1a
        }
    }
    json!({ "losses": losses.join(" "), "weights": format!("{hash:016x}") })
}

/// Where two runs first differ.
fn difference(found: &Value, expected: &Value) -> String {
    let losses = |bits: &Value| -> Vec<String> {
        let losses = bits["losses"].as_str().unwrap_or_default();
        losses.split_whitespace().map(str::to_string).collect()
    };
    let (found, expected) = (losses(found), losses(expected));
    if found.len() != expected.len() {
        return format!("{} losses, expected {}", found.len(), expected.len());
    }
    match found.iter().zip(&expected).position(|(a, b)| a != b) {
        Some(index) => format!("loss {} is the first that differs", index + 1),
        None => "the losses are equal, the weights are not".into(),
    }
}

fn has_fused_multiply_add() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    cfg!(target_arch = "aarch64")
}
