use ibverbs::channel::PreparedWindow;
use ibverbs::{Channel, PooledBuffer, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffers: [PooledBuffer; 2]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let [one, two] = buffers; //~ ERROR
        let [one, two] = &buffers; //~ RIGHT
        let window = PreparedWindow::new([SendWorkRequest::new(one), SendWorkRequest::new(two)])?;
        s.post_window(window)?.wait()?;
        Ok(())
    })
}
