//! The entry points of captures.

use cudarc::driver::sys::{
    CUgraph, CUgraphEdgeData, CUgraphNode, CUstream, CUstreamCaptureMode as Mode,
    CUstreamCaptureStatus as Status,
};

use super::capture;
use super::handles::node_handle;
use crate::error::CUresult;
use crate::handle::{HandleKind, StreamId, encode};
use crate::machine::{Machine, Out, call, put};
use crate::stream;

fn mode_of(number: u32) -> Result<Mode, CUresult> {
    [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ]
    .into_iter()
    .find(|mode| *mode as u32 == number)
    .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> CUresult {
    call("cuStreamBeginCapture_v2", |machine| {
        let stream = stream::resolve(machine, stream)?;
        capture::begin(machine, stream, mode_of(mode)?)
    })
}

/// See the driver's documentation. A failed call returns a null graph.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: CUstream, graph: Out<'_, CUgraph>) -> CUresult {
    call("cuStreamEndCapture", |machine| {
        let stream = stream::resolve(machine, stream)?;
        let graph = graph.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        graph.write(std::ptr::null_mut());
        let made = capture::end(machine, stream)?;
        graph.write(encode(HandleKind::Graph, made));
        Ok(())
    })
}

/// Whether and how a stream captures. Not answerable for the null stream while a stream that it
/// waits for captures.
fn status(machine: &mut Machine, stream: StreamId) -> Result<Status, CUresult> {
    if capture::is_implicit(machine, stream) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    Ok(match &machine.streams.all[stream].capture {
        None => Status::CU_STREAM_CAPTURE_STATUS_NONE,
        Some(own) => match machine.graphs.captures.ongoing[&own.capture].invalid {
            None => Status::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Some(_) => Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        },
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: CUstream, capturing: Out<'_, Status>) -> CUresult {
    call("cuStreamIsCapturing", |machine| {
        let stream = stream::resolve(machine, stream)?;
        let status = status(machine, stream)?;
        put(capturing, status)
    })
}

/// What cuStreamGetCaptureInfo tells of a capture that is valid.
struct Info<'a> {
    id: Out<'a, u64>,
    graph: Out<'a, CUgraph>,
    dependencies: Out<'a, *const CUgraphNode>,
    count: Out<'a, usize>,
}

fn tell(
    machine: &mut Machine,
    stream: CUstream,
    capturing: Out<'_, Status>,
    info: Info<'_>,
) -> Result<(), CUresult> {
    let stream = stream::resolve(machine, stream)?;
    let status = status(machine, stream)?;
    put(capturing, status)?;
    if status != Status::CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Ok(());
    }
    let own = machine.streams.all[stream]
        .capture
        .as_mut()
        .expect("it is capturing");
    let graph = machine.graphs.captures.ongoing[&own.capture].graph;
    own.told = own
        .tail
        .iter()
        .map(|node| node_handle(graph, *node) as u64)
        .collect();
    if info.id.is_some() {
        put(info.id, own.capture)?;
    }
    if info.graph.is_some() {
        put(info.graph, encode(HandleKind::Graph, graph))?;
    }
    if info.dependencies.is_some() {
        put(info.dependencies, own.told.as_ptr().cast())?;
    }
    if info.count.is_some() {
        put(info.count, own.told.len())?;
    }
    Ok(())
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v2<'a>(
    stream: CUstream,
    capturing: Out<'_, Status>,
    id: Out<'a, u64>,
    graph: Out<'a, CUgraph>,
    dependencies: Out<'a, *const CUgraphNode>,
    count: Out<'a, usize>,
) -> CUresult {
    call("cuStreamGetCaptureInfo_v2", |machine| {
        tell(
            machine,
            stream,
            capturing,
            Info {
                id,
                graph,
                dependencies,
                count,
            },
        )
    })
}

/// See the driver's documentation. No edge has data here.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v3<'a>(
    stream: CUstream,
    capturing: Out<'_, Status>,
    id: Out<'a, u64>,
    graph: Out<'a, CUgraph>,
    dependencies: Out<'a, *const CUgraphNode>,
    edges: Out<'a, *const CUgraphEdgeData>,
    count: Out<'a, usize>,
) -> CUresult {
    call("cuStreamGetCaptureInfo_v3", |machine| {
        if edges.is_some() {
            put(edges, std::ptr::null())?;
        }
        tell(
            machine,
            stream,
            capturing,
            Info {
                id,
                graph,
                dependencies,
                count,
            },
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Option<&mut u32>) -> CUresult {
    call("cuThreadExchangeStreamCaptureMode", |machine| {
        let mode = mode.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        *mode = capture::exchange_mode(machine, mode_of(*mode)?) as u32;
        Ok(())
    })
}
