//! That all ranks have opened files of the same kind and size. What follows is work that ranks share row by row: it must not begin otherwise.

use ddp_comm::{Field, World};

use super::Source;
use crate::data::LabelName;
use crate::error::Result;

/// What to do about a difference.
const WAY_OUT: &str = "Give every rank the same data: compare the files on the hosts.";

/// Ends all ranks, with an error that names what differs, unless the files behind `path` are alike.
pub(super) fn check_alike(source: &Source, path: &str, world: &World) -> Result<()> {
    let (features, opened) = (source.features(), &source.opened);
    let of_files = |what: &str| format!("{what} of {} {path}", source.flag);
    let field = |what: &str, value: String| Field::must_match(of_files(what), value, WAY_OUT);
    let labels = source.labels.as_ref().map(|labels| match (&source.names, labels.are_classes()) {
        (Some(_), _) => "texts".to_string(),
        (None, true) => "classes".to_string(),
        (None, false) => format!("{} numbers a row", labels.width()),
    });
    let name = opened.label.as_ref().map(|(LabelName::Column(name) | LabelName::Array(name))| name.clone());
    let lines = |names: Option<&Vec<String>>| names.map_or(String::new(), |names| names.join("\n"));
    Ok(world.handshake(&[
        field("the number of files", features.arrays().len().to_string()),
        field("the number of rows", features.rows().to_string()),
        field("the number of features", features.width().to_string()),
        field("the type of features", features.element()?.to_string()),
        field("the columns", lines(opened.columns.as_ref())),
        field("the label", name.unwrap_or_else(|| "without a name".into())),
        field("the labels", labels.unwrap_or_else(|| "none".into())),
        field("the classes", lines(source.names.as_ref())),
    ])?)
}
