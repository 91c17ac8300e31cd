//! Reads the files of a run: its metrics log and its model.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

/// A metrics log that is well formed: whole lines, each an event, the start first.
#[derive(Debug)]
pub(crate) struct MetricsLog(pub(crate) Vec<Value>);

impl MetricsLog {
    #[track_caller]
    pub(crate) fn read(out: &Path) -> MetricsLog {
        let text =
            std::fs::read_to_string(out.join("metrics.jsonl")).expect("there is a metrics log");
        assert!(text.ends_with('\n'), "the last line is whole: {text}");
        let parse = |line: &str| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))
        };
        let log = MetricsLog(text.lines().map(parse).collect());
        let starts: Vec<bool> = log
            .0
            .iter()
            .map(|event| event["event"] == "start")
            .collect();
        assert!(
            starts[0] && !starts[1..].contains(&true),
            "it starts once: {text}"
        );
        log
    }

    pub(crate) fn start(&self) -> &Value {
        &self.0[0]
    }

    /// The events of this name.
    pub(crate) fn all(&self, name: &str) -> Vec<&Value> {
        self.0
            .iter()
            .filter(|event| event["event"] == name)
            .collect()
    }

    /// The last line; None if the run did not end.
    pub(crate) fn end(&self) -> Option<&Value> {
        self.0.last().filter(|event| event["event"] == "end")
    }

    /// A field of every step.
    #[track_caller]
    pub(crate) fn of_steps(&self, field: &str) -> Vec<f64> {
        self.all("step")
            .into_iter()
            .map(|step| number(step, field))
            .collect()
    }

    /// The losses of all steps and evaluations.
    #[track_caller]
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.of_steps("loss")
            .into_iter()
            .chain(
                self.all("eval")
                    .into_iter()
                    .map(|eval| number(eval, "loss")),
            )
            .collect()
    }
}

#[track_caller]
pub(crate) fn number(event: &Value, field: &str) -> f64 {
    event[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field} is a number: {event}"))
}

/// The names of an event's fields, in their order.
pub(crate) fn fields(event: &Value) -> Vec<&str> {
    event
        .as_object()
        .expect("an event is an object")
        .keys()
        .map(String::as_str)
        .collect()
}

/// The file of the model after step `step`.
#[track_caller]
pub(crate) fn model_bytes(out: &Path, step: u64) -> Vec<u8> {
    let path = out.join(format!("checkpoints/step-{step:08}/model.safetensors"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The values in it, by name, with their shapes.
#[track_caller]
pub(crate) fn model(out: &Path, step: u64) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = model_bytes(out, step);
    let file = SafeTensors::deserialize(&bytes).expect("the file reads back");
    let values = |bytes: &[u8]| {
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    };
    file.iter()
        .map(|(name, tensor)| {
            (
                name.to_string(),
                (tensor.shape().to_vec(), values(tensor.data())),
            )
        })
        .collect()
}
