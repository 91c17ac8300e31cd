//! The optimizer's moments in files: `optimizer.safetensors`, or under ZeRO-1 one file a rank, such
//! as `optimizer-00002-of-00004.safetensors`.
//!
//! The moment of a whole parameter is a tensor `0.weight.exp_avg` in the parameter's shape. If
//! several ranks share a parameter, each has flat pieces: `0.weight.exp_avg[1024..2048]`. The
//! file's metadata `pieces` say as JSON which part of which parameter each one is, so any number of
//! ranks can read them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::files::{mismatch, unreadable};
use super::model::{header_of, without_dropout};
use crate::step::Step;
use ddp_data::safetensors::{Header, TensorEntry};

/// The metadata entry that describes pieces.
const PIECES: &str = "pieces";

/// A tensor of a file: which part of which parameter's moment it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    tensor: String,
    parameter: String,
    moment: String,
    start: usize,
    length: usize,
}

/// A tensor to write, and where its values are.
#[derive(Debug)]
pub(super) struct Outgoing {
    named: Named,
    shape: Vec<usize>,
    /// Which of the moments of all stages, and the range in it.
    pub(super) source: (usize, Range<usize>),
}

impl Outgoing {
    /// The parameter, the name of its moment, and the part of it.
    pub(super) fn place(&self) -> (&str, &str, Range<usize>) {
        let Named {
            parameter,
            moment,
            start,
            length,
            ..
        } = &self.named;
        (parameter, moment, *start..start + length)
    }

    /// This rank's part of the moments of a model.
    pub(super) fn of(step: &Step) -> Vec<Outgoing> {
        let (mut all, mut before) = (Vec::new(), 0);
        for stage in step.stages() {
            let (params, optimizer) = (&stage.model().params, stage.optimizer());
            let mut pieces: Vec<_> = optimizer.owned_pieces().iter().collect();
            pieces.sort_by_key(|piece| (piece.parameter, piece.start));
            for piece in pieces {
                let parameter = params.parameter(piece.parameter);
                let (start, length) = (piece.start, piece.length);
                let (range, shape) = if length == parameter.range.len() {
                    (String::new(), parameter.shape.clone())
                } else {
                    (format!("[{start}..{}]", start + length), vec![length])
                };
                let moments = optimizer.moments().map(|(name, _)| name).zip(before..);
                for (name, moment) in moments.filter(|(name, _)| piece.moments.contains(name)) {
                    all.push(Outgoing {
                        named: Named {
                            tensor: format!("{}.{name}{range}", parameter.name),
                            parameter: parameter.name.clone(),
                            moment: name.to_string(),
                            start,
                            length,
                        },
                        shape: shape.clone(),
                        source: (moment, piece.at..piece.at + length),
                    });
                }
            }
            before += optimizer.moments().count();
        }
        all
    }
}

/// The header of a file with these tensors.
pub(super) fn header(list: &[Outgoing]) -> Header {
    let named = list.iter().map(|outgoing| &outgoing.named);
    let pieces: Vec<&Named> = named.filter(|it| it.tensor.ends_with(']')).collect();
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    if !pieces.is_empty() {
        let pieces = serde_json::to_string(&pieces).expect("only names and numbers");
        metadata.insert(PIECES.into(), pieces);
    }
    let tensors = list.iter().map(|it| (&*it.named.tensor, &*it.shape));
    Header::with_metadata(tensors, metadata)
}

/// The moments in the files of a checkpoint: by parameter and moment, the pieces in order.
#[derive(Debug, Default)]
pub(super) struct SavedMoments {
    pub(super) files: Vec<PathBuf>,
    moments: BTreeMap<(String, String), Vec<SavedPiece>>,
}

/// A piece of a moment in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SavedPiece {
    /// The first element of the parameter.
    pub(super) start: usize,
    pub(super) length: usize,
    /// The number of the file.
    pub(super) file: usize,
    /// The byte in the file.
    pub(super) offset: u64,
}

impl SavedMoments {
    /// Reads the headers of `files`. The inner error says what is wrong with them.
    pub(super) fn read(files: Vec<PathBuf>) -> crate::error::Result<Result<SavedMoments, String>> {
        let mut saved = SavedMoments::default();
        for (file, path) in files.iter().enumerate() {
            let header = header_of(path, &File::open(path).map_err(unreadable(path))?)?;
            if let Err(why) = saved.add(file, &header) {
                let name = path.file_name().unwrap_or_default();
                return Ok(Err(format!("{}: {why}", name.display())));
            }
        }
        for pieces in saved.moments.values_mut() {
            pieces.sort_by_key(|piece| piece.start);
        }
        saved.files = files;
        Ok(Ok(saved))
    }

    /// Adds the tensors of file number `file`.
    pub(super) fn add(&mut self, file: usize, header: &Header) -> Result<(), String> {
        let pieces: Vec<Named> = match header.metadata.get(PIECES) {
            None => Vec::new(),
            Some(text) => serde_json::from_str(text)
                .map_err(|error| format!("its pieces cannot be read: {error}"))?,
        };
        let pieces: BTreeMap<&str, &Named> = pieces
            .iter()
            .map(|named| (named.tensor.as_str(), named))
            .collect();
        for entry in &header.entries {
            let (key, start) = place(entry, pieces.get(entry.name.as_str()).copied())?;
            let (length, offset) = (entry.count(), header.data_start + entry.start);
            self.moments.entry(key).or_default().push(SavedPiece {
                start,
                length,
                file,
                offset,
            });
        }
        Ok(())
    }

    /// Whether the files hold exactly the `wanted` moments, each once and whole. `wanted` gives the
    /// parameter, the name of the moment and the number of elements.
    pub(super) fn check<'a>(
        &self,
        wanted: impl Iterator<Item = (&'a str, &'a str, usize)>,
    ) -> Result<(), String> {
        let mut others: BTreeMap<_, _> = self.moments.iter().collect();
        let mut missing = Vec::new();
        for (parameter, moment, count) in wanted {
            let key = (parameter.to_string(), moment.to_string());
            match others.remove(&key) {
                None => missing.push(format!("{parameter}.{moment}")),
                Some(pieces) => check_whole(pieces, count)
                    .map_err(|why| format!("{parameter}.{moment} {why}"))?,
            }
        }
        let others = others.keys();
        let others = others.map(|(parameter, moment)| format!("{parameter}.{moment}"));
        let others: Vec<String> = others.collect();
        mismatch(&missing, &others, "this run").map_or(Ok(()), Err)
    }

    /// The same moments with the names that parameters have here.
    pub(super) fn without_dropout(self) -> SavedMoments {
        let renamed = |((parameter, moment), pieces): ((String, String), _)| {
            let parameter = without_dropout(&parameter).unwrap_or(parameter);
            ((parameter, moment), pieces)
        };
        SavedMoments {
            moments: self.moments.into_iter().map(renamed).collect(),
            ..self
        }
    }

    /// The pieces of a moment.
    pub(super) fn pieces(&self, parameter: &str, moment: &str) -> &[SavedPiece] {
        self.moments
            .get(&(parameter.to_string(), moment.to_string()))
            .map_or(&[], Vec::as_slice)
    }
}

/// The parameter and moment of a tensor, and the element at which it starts.
fn place(entry: &TensorEntry, named: Option<&Named>) -> Result<((String, String), usize), String> {
    let name = &entry.name;
    if entry.dtype != "F32" {
        return Err(format!("{name} is {}: expected F32", entry.dtype));
    }
    let Some(named) = named else {
        let (parameter, moment) = name
            .rsplit_once('.')
            .ok_or_else(|| format!("{name} is not a parameter's moment"))?;
        return Ok(((parameter.into(), moment.into()), 0));
    };
    if entry.shape != [named.length] {
        return Err(format!(
            "{name} has the shape {:?}, and its piece {} elements",
            entry.shape, named.length
        ));
    }
    Ok(((named.parameter.clone(), named.moment.clone()), named.start))
}

fn check_whole(pieces: &[SavedPiece], count: usize) -> Result<(), String> {
    let mut next = 0usize;
    for piece in pieces {
        if piece.start != next {
            return Err(format!(
                "has a piece that starts at element {}: expected {next} of {count}",
                piece.start
            ));
        }
        if piece.length > count - next {
            return Err(format!(
                "has more than the {count} elements of the parameter"
            ));
        }
        next += piece.length;
    }
    if next == count {
        Ok(())
    } else {
        Err(format!("has {next} of {count} elements"))
    }
}
